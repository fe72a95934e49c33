"""Program x Profile -> start and end of each move; one rank's part of a machine."""
