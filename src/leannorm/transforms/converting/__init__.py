"""What does a norm layer become, and how does it become what it was?"""
