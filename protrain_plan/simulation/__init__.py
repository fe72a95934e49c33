"""Program x Profile -> bytes at every slot, and when each move starts and ends."""
