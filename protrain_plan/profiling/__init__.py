"""Model -> Profile: what every unit costs in bytes and seconds."""
