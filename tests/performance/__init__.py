"""Guards against slow code that need no clock: instruction counts."""
