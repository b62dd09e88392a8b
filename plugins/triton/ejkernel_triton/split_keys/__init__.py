"""Few queries against many keys on Hopper: the device code that attention to arrays and to pages share."""
