"""Generation and prefill over one device: sequences, their blocks, and the thread that runs them."""
