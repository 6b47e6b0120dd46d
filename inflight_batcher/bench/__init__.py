"""Measuring an engine through the step loop, and holding the result against what the machine can do."""
