"""Saving and loading. In: a planned or plain model. Out: folders that are whole at every moment."""
