"""Which values are running statistics of, and when do they stay?"""
