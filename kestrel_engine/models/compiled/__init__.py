"""What LLVM compiles for this CPU: products, attention and whole decode steps, and the memory that they read."""
