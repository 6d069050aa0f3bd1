"""League: players that train against each other and their past, with matchmaking, ratings and a durable record of results."""
