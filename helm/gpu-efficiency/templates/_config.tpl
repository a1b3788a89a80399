{{- /* The daemon's configuration file, what of it is taken up while it runs, and the web configuration. */ -}}

{{- /* Helm reads every number as one with a fraction, and TOML tells 8.0 from 8: whole ones become integers again. */ -}}
{{- define "gpu-efficiency.integers" -}}
{{- $map := . -}}
{{- range $key, $value := $map -}}
{{- if kindIs "float64" $value -}}
{{- if and (eq $value (floor $value)) (lt $value 9e15) (gt $value -9e15) -}}{{- $_ := set $map $key (int64 $value) -}}{{- end -}}
{{- else if kindIs "map" $value -}}{{- include "gpu-efficiency.integers" $value -}}
{{- else if kindIs "slice" $value -}}
{{- $items := list -}}
{{- range $item := $value -}}
{{- if kindIs "map" $item -}}{{- include "gpu-efficiency.integers" $item -}}{{- $items = append $items $item -}}
{{- else if and (kindIs "float64" $item) -}}
{{- $items = append $items (ternary (int64 $item) $item (and (eq $item (floor $item)) (lt $item 9e15) (gt $item -9e15))) -}}
{{- else -}}{{- $items = append $items $item -}}{{- end -}}
{{- end -}}
{{- $_ := set $map $key $items -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The file as text; empty where nothing is configured. privacy.key_file is told here and not by the environment, for the
daemon refuses a file that asks for hashes and names no key. */ -}}
{{- define "gpu-efficiency.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if .Values.privacy.existingSecret -}}
{{- $privacy := get $config "privacy" | default dict -}}
{{- $_ := set $privacy "key_file" (printf "/etc/gpu-efficiency/privacy/%s" .Values.privacy.key) -}}
{{- $_ := set $config "privacy" $privacy -}}
{{- end -}}
{{- if $config -}}
{{- include "gpu-efficiency.integers" $config -}}
{{ toToml $config }}
{{- end -}}
{{- end -}}

{{- /* Of what the daemon does not take up while it runs (exporter.config.LIVE): only a change of that restarts the pods. */ -}}
{{- define "gpu-efficiency.checksum" -}}
{{- $fixed := omit .Values.config "budget" "energy" "exemptions" "log" "policy" "policy_by_model" "prices" "workload" -}}
{{ list $fixed .Values.privacy | toJson | sha256sum }}
{{- end -}}

{{- /* `gpu-efficiency cluster` takes up nothing, and reads these. */ -}}
{{- define "gpu-efficiency.cluster.checksum" -}}
{{ list (pick .Values.config "cluster" "kubernetes" "log" "privacy" "web" "workload") .Values.privacy | toJson | sha256sum }}
{{- end -}}

{{- define "gpu-efficiency.web.secret" -}}
{{- if .Values.web.existingSecret -}}
{{ .Values.web.existingSecret }}
{{- else if .Values.web.config -}}
{{ include "gpu-efficiency.named" (list . "-web") }}
{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.web.key" -}}
{{ ternary .Values.web.existingSecretKey "web.yaml" (not (empty .Values.web.existingSecret)) }}
{{- end -}}

{{- /* "true" or "". */ -}}
{{- define "gpu-efficiency.web.tls" -}}
{{- if .Values.web.existingSecret -}}
{{- if .Values.web.tls -}}true{{- end -}}
{{- else if get .Values.web.config "tls_server_config" -}}true{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.web.scheme" -}}
{{ ternary "https" "http" (eq (include "gpu-efficiency.web.tls" .) "true") }}
{{- end -}}

{{- /* "true" where a client without a certificate does not get in, the kubelet included; else "". */ -}}
{{- define "gpu-efficiency.web.clientCertificates" -}}
{{- if .Values.web.existingSecret -}}
{{- if .Values.web.clientCertificates -}}true{{- end -}}
{{- else if has (dig "tls_server_config" "client_auth_type" "" .Values.web.config) (list "RequireClientCert" "RequireAnyClientCert" "RequireAndVerifyClientCert") -}}true{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.web.authenticates" -}}
{{- if or .Values.web.existingSecret (get .Values.web.config "basic_auth_users") (include "gpu-efficiency.web.clientCertificates" .) -}}true{{- end -}}
{{- end -}}
