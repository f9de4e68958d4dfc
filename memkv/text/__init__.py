"""From bytes to chunks: reading, tokenising, prompting, chunking, embedding, citing."""
