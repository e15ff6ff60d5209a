"""From a recording to what a speech model reads."""
