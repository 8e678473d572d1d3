"""The parts of benchmarks/field.py: who takes part, in which environment, on which problem, and what the page says."""
