"""HTML pages without scripts that load nothing from the network: what the reports of all commands share."""
