"""A queue that trains the rows of the papers, and what came of it."""
