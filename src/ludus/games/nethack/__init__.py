"""NetHack by orders: `ludus/NetHackOrders-v0` plays the game of the package `nle`, one order such as *explore* or *fight* per step."""
