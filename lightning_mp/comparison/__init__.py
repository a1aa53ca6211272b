"""Plans side by side on one module and its data: seed by seed from the same weights over the same batches."""
