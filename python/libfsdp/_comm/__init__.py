"""Process groups, collectives and their memory."""
