"""How does the engine reach its workers?"""
