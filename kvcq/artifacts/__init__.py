"""Every file format of kvcq: stats, fit, report and bundle, written whole or not at all, read only when intact."""
