"""Block fine-tuning: models that answer as well from documents encoded apart as from a whole."""
