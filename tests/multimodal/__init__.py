"""Tests of jubako.multimodal."""
