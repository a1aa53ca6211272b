"""What the tests share: small real models, real fits, real processes, and a counter of host reads."""
