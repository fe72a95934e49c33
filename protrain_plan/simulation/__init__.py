"""Program x Profile -> when each move starts and ends; what one rank has of a machine."""
