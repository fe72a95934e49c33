"""Program x Profile -> when each move starts and ends, and what a step waits for."""
