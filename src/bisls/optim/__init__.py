"""Step-size rules as torch optimisers."""
