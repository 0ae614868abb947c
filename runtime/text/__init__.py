"""From texts and conversations to token ids, and back."""
