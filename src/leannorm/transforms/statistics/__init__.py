"""Which values are running statistics computed from, and when do they stay?"""
