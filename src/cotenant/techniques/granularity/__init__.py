"""GACER: chunks of batches and synchronisation points between models. See README.md."""
