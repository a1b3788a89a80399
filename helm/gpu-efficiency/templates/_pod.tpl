{{- /* What the exporters' pods and the cluster's have in common. */ -}}

{{- /* "true" where environments of other users' processes are read; a process's user and unit everybody may see. */ -}}
{{- define "gpu-efficiency.ptrace" -}}
{{- if and .Values.kubernetes.hostProcesses (or (eq .Values.scheduler "kubernetes") .Values.workloads.reportsPath .Values.workloads.engines) -}}true{{- end -}}
{{- end -}}

{{- /* "true" where the container must be root: the kubelet's socket is root's, and a capability means nothing to another user. */ -}}
{{- define "gpu-efficiency.root" -}}
{{- if or (eq .Values.scheduler "kubernetes") (include "gpu-efficiency.ptrace" .) .Values.dcgm.sysAdmin -}}true{{- end -}}
{{- end -}}

{{- /*
"true" where the container needs no GPU: another program measures, and nobody asks for the driver's list of processes.
*/ -}}
{{- define "gpu-efficiency.void" -}}
{{- $elsewhere := or (eq .Values.source "dcgm-exporter") (and (eq .Values.source "dcgm") (ne .Values.dcgm.address "embedded")) -}}
{{- if and $elsewhere (eq .Values.scheduler "kubernetes") (not .Values.kubernetes.hostProcesses) -}}true{{- end -}}
{{- end -}}

{{- /* (overrides, is it root, does it read Secrets). */ -}}
{{- define "gpu-efficiency.podSecurityContext" -}}
{{- $context := dict "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if index . 1 -}}
{{- $_ := set $context "runAsUser" 0 -}}
{{- $_ := set $context "runAsGroup" 0 -}}
{{- else -}}
{{- $_ := set $context "runAsNonRoot" true -}}
{{- $_ := set $context "runAsUser" 65532 -}}
{{- $_ := set $context "runAsGroup" 65532 -}}
{{- if index . 2 -}}{{- $_ := set $context "fsGroup" 65532 -}}{{- end -}}
{{- end -}}
{{- include "gpu-efficiency.over" (list (index . 0) $context) -}}
{{- end -}}

{{- /*
(overrides, capabilities to add).
Kubernetes means to refuse allowPrivilegeEscalation: false beside SYS_ADMIN, and already does for it spelled CAP_SYS_ADMIN
(kubernetes/kubernetes#119568): it is left out there.
*/ -}}
{{- define "gpu-efficiency.securityContext" -}}
{{- $capabilities := dict "drop" (list "ALL") -}}
{{- with index . 1 -}}{{- $_ := set $capabilities "add" . -}}{{- end -}}
{{- $context := dict "readOnlyRootFilesystem" true "capabilities" $capabilities -}}
{{- if not (has "SYS_ADMIN" (index . 1)) -}}{{- $_ := set $context "allowPrivilegeEscalation" false -}}{{- end -}}
{{- include "gpu-efficiency.over" (list (index . 0) $context) -}}
{{- end -}}

{{- define "gpu-efficiency.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Of the values given, or of `cluster` in them. */ -}}
{{- define "gpu-efficiency.placing" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "gpu-efficiency.probe" -}}
{{- $root := index . 0 -}}
{{- if include "gpu-efficiency.web.clientCertificates" $root }}
tcpSocket:
  port: {{ index . 2 }}
{{- else }}
httpGet:
  path: {{ index . 1 }}
  port: {{ index . 2 }}
  {{- if include "gpu-efficiency.web.tls" $root }}
  scheme: HTTPS
  {{- end }}
{{- end }}
{{- range $key, $value := index . 3 }}
{{ $key }}: {{ int $value }}
{{- end }}
{{- end -}}

{{- define "gpu-efficiency.probes" -}}
livenessProbe:
  {{- with include "gpu-efficiency.probe" (list (index . 0) "/healthz" (index . 1) (index . 0).Values.livenessProbe) | trim }}{{- . | nindent 2 }}{{- end }}
readinessProbe:
  {{- with include "gpu-efficiency.probe" (list (index . 0) "/readyz" (index . 1) (index . 0).Values.readinessProbe) | trim }}{{- . | nindent 2 }}{{- end }}
{{- end -}}

{{- /* Flags, mounts and volumes of configuration, certificates and keys: the same for both. */ -}}
{{- define "gpu-efficiency.flags" -}}
{{- if include "gpu-efficiency.config" . }}
- --config
- /etc/gpu-efficiency/config/config.toml
{{- end }}
{{- end -}}

{{- define "gpu-efficiency.webEnv" -}}
{{- if include "gpu-efficiency.web.secret" . }}
- name: GPU_EFFICIENCY_WEB_CONFIG_FILE
  value: /etc/gpu-efficiency/web/{{ include "gpu-efficiency.web.key" . }}
{{- end }}
{{- end -}}

{{- /* Folders, never single files (subPath): those would not change with their ConfigMap or Secret. */ -}}
{{- define "gpu-efficiency.mounts" -}}
{{- if include "gpu-efficiency.config" . }}
- name: config
  mountPath: /etc/gpu-efficiency/config
  readOnly: true
{{- end }}
{{- if include "gpu-efficiency.web.secret" . }}
- name: web
  mountPath: /etc/gpu-efficiency/web
  readOnly: true
{{- end }}
{{- if .Values.web.tlsSecret }}
- name: tls
  mountPath: /etc/gpu-efficiency/tls
  readOnly: true
{{- end }}
{{- if .Values.privacy.existingSecret }}
- name: privacy
  mountPath: /etc/gpu-efficiency/privacy
  readOnly: true
{{- end }}
{{- end -}}

{{- /* (root, mode). Secrets are readable by the container's own user alone: 256 is 0400, and 288 is 0440 for their group, fsGroup. */ -}}
{{- define "gpu-efficiency.volumes" -}}
{{- $root := index . 0 -}}{{- $mode := index . 1 -}}
{{- if include "gpu-efficiency.config" $root }}
- name: config
  configMap:
    name: {{ include "gpu-efficiency.named" (list $root "-config") }}
{{- end }}
{{- with include "gpu-efficiency.web.secret" $root }}
- name: web
  secret:
    secretName: {{ . }}
    defaultMode: {{ $mode }}
{{- end }}
{{- with $root.Values.web.tlsSecret }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: {{ $mode }}
{{- end }}
{{- with $root.Values.privacy.existingSecret }}
- name: privacy
  secret:
    secretName: {{ . }}
    defaultMode: {{ $mode }}
{{- end }}
{{- end -}}

{{- /* "true" where a Secret is mounted: a user other than root then needs fsGroup to read it. */ -}}
{{- define "gpu-efficiency.secrets" -}}
{{- if or (include "gpu-efficiency.web.secret" .) .Values.web.tlsSecret .Values.privacy.existingSecret -}}true{{- end -}}
{{- end -}}

{{- /* "true" if a volume of the user's own is mounted there: (list $ path). */ -}}
{{- define "gpu-efficiency.mounted" -}}
{{- $path := index . 1 -}}
{{- range (index . 0).Values.extraVolumeMounts -}}
{{- if eq (trimSuffix "/" .mountPath) $path -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Where the store is: hostPath, emptyDir, extra (in a volume of the user's own) or none. */ -}}
{{- define "gpu-efficiency.history" -}}
{{- $own := include "gpu-efficiency.mounted" (list . "/var/lib/gpu-efficiency") -}}
{{- $volume := .Values.history.volume -}}
{{- if and $own (ne $volume "none") -}}extra
{{- else if ne $volume "auto" -}}{{ $volume }}
{{- else -}}{{ ternary "hostPath" "emptyDir" (eq (include "gpu-efficiency.uid" .) "0") }}{{- end -}}
{{- end -}}

{{- /* The exporter's user. */ -}}
{{- define "gpu-efficiency.uid" -}}
{{- $root := eq (include "gpu-efficiency.root" .) "true" -}}
{{- $context := include "gpu-efficiency.podSecurityContext" (list .Values.podSecurityContext $root "") | fromYaml -}}
{{- $own := include "gpu-efficiency.securityContext" (list .Values.securityContext list) | fromYaml -}}
{{- if hasKey $own "runAsUser" -}}{{ int64 (get $own "runAsUser") }}
{{- else if hasKey $context "runAsUser" -}}{{ int64 (get $context "runAsUser") }}
{{- else -}}65532{{- end -}}
{{- end -}}

{{- define "gpu-efficiency.history.prepare" -}}
{{- if and .Values.history.prepare (eq (include "gpu-efficiency.history" .) "hostPath") (ne (include "gpu-efficiency.uid" .) "0") -}}true{{- end -}}
{{- end -}}

{{- /*
Root, with one right and one folder, for the moment in which that folder is given away, with the files of a pod that was
another user's. Without the right to read other users' folders, it takes the folder first.
*/ -}}
{{- define "gpu-efficiency.history.container" -}}
{{- $uid := include "gpu-efficiency.uid" . -}}
- name: prepare
  image: {{ include "gpu-efficiency.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - python
    - -I
    - -c
    - |
      import os
      store = "/var/lib/gpu-efficiency"
      os.chown(store, 0, 0)
      for name in os.listdir(store):
          os.lchown(os.path.join(store, name), {{ $uid }}, {{ $uid }})
      os.chown(store, {{ $uid }}, {{ $uid }})
  resources:
    requests:
      cpu: 10m
      memory: 32Mi
    limits:
      memory: 64Mi
  securityContext:
    allowPrivilegeEscalation: false
    capabilities:
      add: [CHOWN]
      drop: [ALL]
    readOnlyRootFilesystem: true
    runAsGroup: 0
    runAsNonRoot: false
    runAsUser: 0
  volumeMounts:
    - name: history
      mountPath: /var/lib/gpu-efficiency
{{- end -}}
