"""Output of a given form: JSON of a schema, a regular expression, a choice, a grammar."""
