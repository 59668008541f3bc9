"""The one place that calls pynvml: reads boards and geometries, performs one operation at a time, maps errors."""
