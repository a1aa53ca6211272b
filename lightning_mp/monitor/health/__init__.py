"""The measurements of one training step, and the run that makes them: loss, norms, loss scale, speed, memory."""
