{{- /* A group's rules as YAML (`rules:` and the list), with what the values say of its alerts: (rules' values, list of rules). */ -}}
{{- define "gpu-efficiency.rules" -}}
{{- $values := index . 0 -}}
{{- $kept := list -}}
{{- range $rule := index . 1 -}}
{{- if not (hasKey $rule "alert") -}}
{{- $kept = append $kept $rule -}}
{{- else -}}
{{- $own := get $values.alerts $rule.alert | default dict -}}
{{- if ne (toString (get $own "enabled")) "false" -}}
{{- $_ := set $rule "labels" (merge (deepCopy (get $own "labels" | default dict)) $values.alertLabels $rule.labels) -}}
{{- $_ := set $rule "annotations" (merge (deepCopy (get $own "annotations" | default dict)) $rule.annotations) -}}
{{- with get $own "severity" -}}{{- $_ := set $rule.labels "severity" . -}}{{- end -}}
{{- with get $own "for" -}}{{- $_ := set $rule "for" . -}}{{- end -}}
{{- with get $own "keepFiringFor" -}}{{- $_ := set $rule "keep_firing_for" . -}}{{- end -}}
{{- with get $own "expr" -}}{{- $_ := set $rule "expr" . -}}{{- end -}}
{{- include "gpu-efficiency.addresses" (list $values $rule.annotations (get $own "annotations" | default dict)) -}}
{{- $kept = append $kept $rule -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "rules" $kept) -}}
{{- end -}}

{{- /* The project's paths become addresses; those that the values give for one alert stay. */ -}}
{{- define "gpu-efficiency.addresses" -}}
{{- $values := index . 0 -}}{{- $annotations := index . 1 -}}{{- $own := index . 2 -}}
{{- with $values.runbookBaseUrl -}}
{{- if not (hasKey $own "runbook_url") -}}
{{- $_ := set $annotations "runbook_url" (printf "%s/%s" (trimSuffix "/" .) (base $annotations.runbook_url)) -}}
{{- end -}}
{{- end -}}
{{- with $values.dashboardBaseUrl -}}
{{- if not (hasKey $own "dashboard_url") -}}
{{- $_ := set $annotations "dashboard_url" (printf "%s%s" (trimSuffix "/" .) $annotations.dashboard_url) -}}
{{- end -}}
{{- end -}}
{{- end -}}
