"""An app that writes rows."""
