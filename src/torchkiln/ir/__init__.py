"""Loop IR: index expressions, scalar expressions and programs, which lowering makes and later stages read."""
