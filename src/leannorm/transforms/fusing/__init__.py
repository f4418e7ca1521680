"""Which calls of a block are one pass of a kernel, and how are they made so?"""
