"""The files by which programs find a driver: what they show of a machine, kept on disk, and programs run among them."""
