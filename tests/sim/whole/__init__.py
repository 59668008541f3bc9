"""Stories of whole clusters with migd on them, drawn from seeds: what happens, what must hold, how it must end."""
