"""How is a token chosen from logits?"""
