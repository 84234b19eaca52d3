"""What the product costs: time, memory and quality beside others, measured in one run."""
