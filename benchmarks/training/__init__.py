"""What `benchmarks/networks.py` trains, and with what."""
