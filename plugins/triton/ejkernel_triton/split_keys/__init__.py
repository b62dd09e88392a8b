"""Few queries against many keys, split among programs on Hopper: what attention to arrays and to pages share."""
