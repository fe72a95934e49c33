"""Model -> Profile: every unit's bytes and seconds."""
