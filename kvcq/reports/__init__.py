"""Human forms of a report: terminal tables, self-contained HTML, the bundle's card."""
