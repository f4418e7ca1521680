"""Which batch norms are part of their neighbours in inference?"""
