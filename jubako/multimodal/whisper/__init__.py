"""What Whisper's decoder is asked, and what its answer says."""
