"""Every file format of kvcq: staged writing, integrity, stats, fit, report and bundle."""
