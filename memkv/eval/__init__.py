"""What reuse costs: answers with and without it, compared question by question."""
