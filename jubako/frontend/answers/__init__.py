"""Parts of an answer: what a model thinks, what it says, and which tools it calls."""
