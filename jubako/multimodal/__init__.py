"""What users send beside text, made ready for the model. Imports no torch."""
