"""What do the `bench` commands measure, and how?"""
