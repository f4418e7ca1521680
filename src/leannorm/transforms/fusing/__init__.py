"""Which calls of a block can be one pass of a kernel, and how are they fused?"""
