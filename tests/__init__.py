"""The tests, by tier: unit, integration, acceptance, chaos."""
